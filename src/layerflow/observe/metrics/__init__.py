"""Figures for Prometheus: those of the server, and one file per part of it that counts for itself."""
