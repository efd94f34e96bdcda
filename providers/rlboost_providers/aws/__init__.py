"""EC2 through boto3: spot and on-demand machines, prices and error texts."""
