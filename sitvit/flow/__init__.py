"""The mathematics of flows, on callables alone: `velocity(x_t, t) -> tensor` like `x_t`.

Time t runs in [0, 1] with shape (B,); t = 0 is noise and t = 1 is data.
"""
