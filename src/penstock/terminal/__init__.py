"""What people see while they wait: bars, and the stages at work. Quiet where there is no terminal."""
