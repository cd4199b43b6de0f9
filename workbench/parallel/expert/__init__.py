"""Expert parallelism (GShard, arXiv 2006.16668): each rank holds some experts of every MoE
layer.
"""
