"""An S3 server with users that may do nothing but what the bucket's policy allows them."""

import copy
import json

from localstack.seaweedfs import SeaweedFS

PRINCIPAL = "arn:aws:iam::000000000000:user/"  # what SeaweedFS calls its users


class Limited(SeaweedFS):
    """A SeaweedFS with a user of each name beside the one who may do everything."""

    users = ("reader", "trainer", "collector")

    def _command(self, folder, ports):
        command = super()._command(folder, ports)
        path = folder / "s3.json"
        config = json.loads(path.read_text())
        for user in self.users:
            credentials = [{"accessKey": user, "secretKey": self._secret}]
            config["identities"].append({"name": user, "credentials": credentials, "actions": []})
        path.write_text(json.dumps(config))
        return command

    def options_of(self, user):
        return {**self.options(), "key": user}

    def set_policy(self, policy):
        """Set a bucket policy whose principals are the users of the names that the roles have.

        SeaweedFS does not know the condition key `s3:if-none-match` and takes it for absent: conditions on it are taken
        out, and what is denied because of one alone.
        """
        policy = copy.deepcopy(policy)
        for statement in policy["Statement"]:
            if statement["Principal"] != "*":
                statement["Principal"] = {"AWS": PRINCIPAL + statement["Principal"]["AWS"].rpartition("/")[2].lower()}
            if "s3:if-none-match" in statement.get("Condition", {}).get("Null", {}):
                del statement["Condition"]
                statement["Sid"] = "LEFT_OUT" if statement["Effect"] == "Deny" else statement["Sid"]
        policy["Statement"] = [each for each in policy["Statement"] if each["Sid"] != "LEFT_OUT"]
        self.client().put_bucket_policy(Bucket=self.bucket, Policy=json.dumps(policy))
