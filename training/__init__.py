"""Recipes of the models that come with vlmserve."""
