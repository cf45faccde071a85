"""Cancels and replaces at the moment of delivery, with kills; see ``make race``."""
