"""fp8 GEMMs of linear layers, with scales that do not depend on the mesh."""
