"""What has been promised?"""
