"""Looking into a running engine, and changing its settings."""
