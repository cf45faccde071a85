"""What bide, other clients and the broker can do; none of it is part of the package."""
