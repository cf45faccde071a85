"""The process that follows the schedule log and delivers scheduled messages."""
