"""Parameters: freezing, groups, Muon."""
