"""Fits what no kernel table holds to a real run."""
