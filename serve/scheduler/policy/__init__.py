"""The scheduler's rules of thumb: order, victims, headroom, pace."""
