"""What saving and loading costs, beside other tools: `python -m benchmarks NAME`. Not in the wheel."""
