"""The console: a web page for the people who run bide."""
