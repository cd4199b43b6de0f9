"""What DAPPLE's authors published: layer profiles, plans, and how the search compares."""
