"""The fit of the cost model's few multipliers to published measurements, one site left out at a
time.
"""
