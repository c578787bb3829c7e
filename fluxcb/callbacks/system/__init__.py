"""Callbacks for the machine: devices, memory and processes."""
