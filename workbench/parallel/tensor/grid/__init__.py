"""Tensor parallelism on grids: 2-D (SUMMA; Optimus, arXiv 2104.05343), 2.5-D (Tesseract, arXiv
2105.14500) and 3-D (arXiv 2105.14450), as in Colossal-AI (arXiv 2110.14883).
"""
