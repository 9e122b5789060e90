"""Who asks: keys, names, limits."""
