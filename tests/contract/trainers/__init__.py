"""What other trainers' own code gives for their configurations, recorded, for tests/contract/test_init_equals_trainers.py."""
