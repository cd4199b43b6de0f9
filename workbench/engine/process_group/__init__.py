"""How ranks form a process group: rendezvous, GPUs and cores, the folder that they share."""
