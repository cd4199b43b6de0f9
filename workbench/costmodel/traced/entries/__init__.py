"""What each operator of a traced graph does on shapes, by kind."""
