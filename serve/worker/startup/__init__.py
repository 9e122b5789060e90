"""What is measured and decided before the first step."""
