"""`python -m swapopt_mindspore demo`: train natively and with swapped states, compare, report.

Needs the ``cli`` extra (rich, matplotlib); nothing that trains imports it.
"""
