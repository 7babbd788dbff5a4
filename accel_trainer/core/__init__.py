"""What all other packages share: types, errors, batch arithmetic, randomness, files.

In docstrings, **Collective** means that all processes must call the function, in the same order.
**Host sync** means that the host waits for the device.
"""
