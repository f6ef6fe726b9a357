"""Launches on several hosts: hostfile, agents, channels, probes."""
