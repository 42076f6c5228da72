"""`rekindle doctor`: examines this machine and prints what is wrong, with a remedy for each fault.

Begin with `examine_machine.py`.
"""
