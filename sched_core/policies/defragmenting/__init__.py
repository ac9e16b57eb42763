"""Defragmentation for any policy with a placement: ``policy`` moves gangs, ``board`` knows the devices."""
