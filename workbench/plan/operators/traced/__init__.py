"""A user's module as a traced graph: dims of its operators, and how strategies place them."""
