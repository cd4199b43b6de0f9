"""Expert parallelism: each rank holds some experts, tokens go to them and come back
(2006.16668).
"""
