"""`python -m swapopt_torch bench`: what a swapped step costs, beside other ways and the floor.

Needs torch alone; with the ``cli`` extra (rich, matplotlib) the table is nicer and there is a
picture. Nothing that trains imports it.
"""
