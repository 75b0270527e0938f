"""The original packages, one flag away: AutoAWQ and AutoGPTQ themselves, run beside qtool's own quantizers.

Each is driven by a script of its own (`*_script.py`), which imports nothing of qtool and runs in a process of its own:
AutoAWQ's in this Python, AutoGPTQ's in an environment that `environment.py` makes.
"""
