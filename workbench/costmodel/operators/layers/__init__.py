"""Parts of layers on shapes that not every model has: dropout, context parallelism, experts."""
