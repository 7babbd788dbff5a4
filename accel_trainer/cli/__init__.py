"""The command `accel-trainer`.

A module of this package or of `lab` is a command if its docstring begins with "`accel-trainer NAME
ARGUMENTS`:" and a summary, and ends with an example. `main.find_commands` finds these modules; they
are registered nowhere else. What several commands share is in `common`, and what reads run folders
is in `runs`.
"""
