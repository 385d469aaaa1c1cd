"""Formats of dates in pages, one package a language."""
