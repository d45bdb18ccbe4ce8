"""Stored runs, the paper's figures, and the tables made of both."""
