"""What SkyPilot sets on the nodes of a task."""

ONE_NODE = {
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NUM_NODES": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.7\n",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
}
