"""The device's memory: how much there is, how much is used, and a device that is made to have only so much.

`budget` emulates or caps a GPU, `device` is the seam through which a worker sees whichever device it has,
`catalogue` knows the cards (and imports no torch), `sampler` looks at real ones.
"""
