"""What every operation costs: one module a family, and the harness that they share."""
