"""One small fabric as each InfiniBand tool prints it: two hosts, two leaves, a spine, a dead port, some noise."""
# ruff: noqa: E501, W291 - the tools' own lines

IBNETDISCOVER = """\
src/query_smp.c:195; umad (DR path slid 0; dlid 0; 0,1,1,31 Attr 0x11:0) bad status 110; Connection timed out
#
# Topology file: generated on Fri Nov 20 15:37:28 2026
#
# Initiated from node 00000000000000aa port 00000000000000aa

vendid=0x2c9
devid=0xd2f2
sysimgguid=0x1
switchguid=0x1(1)
Switch\t4 "S-0000000000000001"\t\t# "MF0;leaf1:MQM9701/U1" enhanced port 0 lid 1 lmc 0
[1]\t"H-00000000000000a0"[1](a1) \t\t# "n1 mlx5_0" lid 4 4xNDR
[3]\t"S-0000000000000003"[1]\t\t# "spine" lid 3 4xNDR

vendid=0x2c9
devid=0xd2f2
sysimgguid=0x2
switchguid=0x2(2)
Switch\t4 "S-0000000000000002"\t\t# "MF0;leaf2:MQM9701/U1" enhanced port 0 lid 2 lmc 0
[1]\t"H-00000000000000b0"[1](b1) \t\t# "n2 mlx5_0" lid 5 4xHDR
[3]\t"S-0000000000000003"[2]\t\t# "spine" lid 3 4xNDR

vendid=0x2c9
devid=0xd2f2
sysimgguid=0x3
switchguid=0x3(3)
Switch\t4 "S-0000000000000003"\t\t# "spine" base port 0 lid 3 lmc 0
[1]\t"S-0000000000000001"[3]\t\t# "MF0;leaf1:MQM9701/U1" lid 1 4xNDR
[2]\t"S-0000000000000002"[3]\t\t# "MF0;leaf2:MQM9701/U1" lid 2 4xNDR

vendid=0x2c9
devid=0x1021
sysimgguid=0xa0
caguid=0xa0
Ca\t1 "H-00000000000000a0"\t\t# "n1 mlx5_0"
[1](a1) \t"S-0000000000000001"[1]\t\t# lid 4 lmc 0 "MF0;leaf1:MQM9701/U1" lid 1 4xNDR

vendid=0x2c9
devid=0x1021
sysimgguid=0xb0
caguid=0xb0
Ca\t1 "H-00000000000000b0"\t\t# "n2 mlx5_0"
[1](b1) \t"S-0000000000000002"[1]\t\t# lid 5 lmc 0 "MF0;leaf2:MQM9701/U1" lid 2 4xHDR
"""

IBNETDISCOVER_PORTS = """\
DR path slid 0; dlid 0; 0 -> new Channel Adapter {00000000000000a0} portnum 1 lid 0-0 ""
CA     4  1 0x00000000000000a1 4x NDR - SW     1  1 0x0000000000000001 ( 'n1 mlx5_0' - 'MF0;leaf1:MQM9701/U1' )
CA     5  1 0x00000000000000b1 4x HDR - SW     2  1 0x0000000000000002 ( 'n2 mlx5_0' - 'MF0;leaf2:MQM9701/U1' )
SW     1  1 0x0000000000000001 4x NDR - CA     4  1 0x00000000000000a1 ( 'MF0;leaf1:MQM9701/U1' - 'n1 mlx5_0' )
SW     1  2 0x0000000000000001 4x SDR                                    'MF0;leaf1:MQM9701/U1'
SW     1  3 0x0000000000000001 4x NDR - SW     3  1 0x0000000000000003 ( 'MF0;leaf1:MQM9701/U1' - 'spine' )
SW     2  1 0x0000000000000002 4x HDR - CA     5  1 0x00000000000000b1 ( 'MF0;leaf2:MQM9701/U1' - 'n2 mlx5_0' )
SW     2  3 0x0000000000000002 4x NDR - SW     3  2 0x0000000000000003 ( 'MF0;leaf2:MQM9701/U1' - 'spine' )
SW     3  1 0x0000000000000003 4x NDR - SW     1  3 0x0000000000000001 ( 'spine' - 'MF0;leaf1:MQM9701/U1' )
SW     3  2 0x0000000000000003 4x NDR - SW     2  3 0x0000000000000002 ( 'spine' - 'MF0;leaf2:MQM9701/U1' )
"""


DUMP_LFTS = """\
Unicast lids [0x0-0x5] of switch DR path slid 0; dlid 0; 0,1 guid 0x0000000000000001 (MF0;leaf1:MQM9701/U1):
  Lid  Out   Destination
       Port     Info 
0x0001 000 : (Switch portguid 0x0000000000000001: 'MF0;leaf1:MQM9701/U1')
0x0002 003 : (Switch portguid 0x0000000000000002: 'MF0;leaf2:MQM9701/U1')
0x0004 001 : (Channel Adapter portguid 0x00000000000000a1: 'n1 mlx5_0')
0x0005 003 : (Channel Adapter portguid 0x00000000000000b1: 'n2 mlx5_0')
4 valid lids dumped 
Unicast lids [0x0-0x5] of switch Lid 2 guid 0x0000000000000002 (MF0;leaf2:MQM9701/U1):
  Lid  Out   Destination
       Port     Info 
0x0004 003 : (Channel Adapter portguid 0x00000000000000a1: 'n1 mlx5_0')
0x0005 001 : (Channel Adapter portguid 0x00000000000000b1: 'n2 mlx5_0')
ibroute: iberror: failed: dump tables: linear forwarding table get failed
Unicast lids [0x0-0x5] of switch Lid 3 guid 0x0000000000000003 (spine):
  Lid  Out   Destination
       Port     Info 
0x0004 001 : (Channel Adapter portguid 0x00000000000000a1: 'n1 mlx5_0')
0x0005 002 : (Channel Adapter portguid 0x00000000000000b1: 'n2 mlx5_0')
2 valid lids dumped 
"""


# A SHARP node at leaf1: before which line its cable is, the cable, and its own section.
AGGREGATION = {
    "ibnetdiscover": (
        '[3]\t"S-0000000000000003"[1]',
        '[4]\t"H-000000000000000e"[1](e) \t\t# "Mellanox Technologies Aggregation Node" lid 9 4xNDR\n',
        '\ncaguid=0xe\nCa\t1 "H-000000000000000e"\t\t# "Mellanox Technologies Aggregation Node"\n'
        '[1](e) \t"S-0000000000000001"[4]\t\t# lid 9 lmc 0 "MF0;leaf1:MQM9701/U1" lid 1 4xNDR\n',
    ),
    "ibnetdiscover -p": (
        "SW     1  3",
        "SW     1  4 0x0000000000000001 4x NDR - CA     9  1 0x000000000000000e ( 'MF0;leaf1:MQM9701/U1' - 'Mellanox Technologies Aggregation Node' )\n",
        "CA     9  1 0x000000000000000e 4x NDR - SW     1  4 0x0000000000000001 ( 'Mellanox Technologies Aggregation Node' - 'MF0;leaf1:MQM9701/U1' )\n",
    ),
}
