"""What every room needs that lets requests wait: Triton's queue policies, deadlines, a timer. Knows no room."""
