"""Tests of lateness, which run alone and serially: ``make test-timing``."""
