"""Which schedule updates a linear weight: measured tables, the rule where nothing was measured, and measuring.

table.py    what was measured: the table in the package and that in the user's cache
choose.py   the choice at a launch
tune.py     measuring the schedules of this machine on clones
timer.py    times on a GPU
command.py  `forge-gen tune`
"""
