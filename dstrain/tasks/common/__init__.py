"""What tasks share: their interface, models, forward passes, judges and registry."""
