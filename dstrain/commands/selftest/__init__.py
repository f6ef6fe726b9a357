"""`dstrain selftest`: every ZeRO stage trains, stops, resumes, exports and evaluates on this machine."""
