"""How a plain model is spread over a mesh: one folder an axis, one layout for every tensor."""
