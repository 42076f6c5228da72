"""ROOM engine/settings"""
