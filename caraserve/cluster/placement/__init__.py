"""Chooses the instances that hold each adapter."""
