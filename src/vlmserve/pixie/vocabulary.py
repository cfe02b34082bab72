"""Everything that pixie knows: colours, shapes, places and words."""

from __future__ import annotations

from typing import Final

Rgb = tuple[int, int, int]

#: Anchor values of each colour name. A drawn colour is an anchor plus a small jitter.
COLOUR_ANCHORS: Final[dict[str, tuple[Rgb, ...]]] = {
    "red": ((255, 0, 0), (230, 25, 25), (220, 20, 60), (215, 30, 30), (255, 50, 45)),
    "orange": ((255, 165, 0), (255, 140, 0), (240, 125, 20)),
    "yellow": ((255, 255, 0), (255, 225, 0), (240, 220, 40), (250, 240, 80)),
    "green": ((0, 128, 0), (0, 255, 0), (34, 139, 34), (50, 205, 50), (60, 160, 70)),
    "blue": ((0, 0, 255), (30, 60, 220), (65, 105, 225), (0, 0, 190), (30, 120, 240)),
    "purple": ((128, 0, 128), (138, 43, 226), (148, 0, 211), (110, 30, 160)),
    "pink": ((255, 192, 203), (255, 105, 180), (255, 182, 193), (250, 140, 190)),
    "brown": ((165, 42, 42), (139, 69, 19), (150, 75, 0), (120, 70, 35)),
    "black": ((0, 0, 0), (15, 15, 15), (30, 30, 32)),
    "white": ((255, 255, 255), (248, 248, 248), (240, 240, 240)),
}
COLOURS: Final[tuple[str, ...]] = tuple(COLOUR_ANCHORS)

SHAPES: Final[tuple[str, ...]] = ("circle", "square", "triangle", "star", "cross", "heart", "diamond", "ring")
PLURALS: Final[dict[str, str]] = {shape: "crosses" if shape == "cross" else f"{shape}s" for shape in SHAPES}

#: In reading order: place ``3 * row + column``.
PLACES: Final[tuple[str, ...]] = (
    "top left",
    "top",
    "top right",
    "left",
    "middle",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)

DIGITS: Final[str] = "0123456789"
LETTERS: Final[str] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

#: Words in images. Training also writes random letters, so that the model has to read.
WORDS: Final[tuple[str, ...]] = tuple(
    """
    AT BE BY DO GO HE HI IF IN IT ME MY NO OF OK ON OR SO TO UP US WE ACE AGE AIR ANT APE ARM ART BAG BAT BED BEE
    BIG BOX BOY BUS CAN CAP CAR CAT COW CRY CUP DAY DOG DRY EAR EAT EGG END EYE FAN FAR FLY FOG FOX FUN GAS HAT HEN
    HOT ICE INK JAM JAR JOB JOY KEY KID LEG LOG MAN MAP MUD NET NEW NUT OAK OIL OLD OWL PAN PEN PIE PIG RED RUN SEA
    SKY SUN TAX TEA TEN TOP TOY VAN WAX WEB WHY YES ZOO BABY BALL BANK BEAR BIRD BLUE BOAT BOOK BUSY CAKE CITY COLD
    COOK DARK DEER DESK DOOR DUCK EASY EXIT FACE FARM FAST FIRE FISH FIVE FOUR FROG GAME GIFT GIRL GOAT GOLD HAND
    HELP HOME HOPE JAZZ JUMP KING KITE LAKE LAMP LION LOVE MILK MOON NEST NICE NOTE OPEN PARK PINK PLAY QUIZ RAIN
    RING ROAD ROCK ROSE SALE SALT SHIP SHOP SNOW SOUP STAR STOP TAXI TREE WALK WAVE WIND WOLF WOOD WORK YARN ZERO
    ZONE APPLE BEACH BLACK BREAD BRICK BROWN CHAIR CHESS CLOCK CLOUD DANCE DREAM EARTH EIGHT FIELD FLAME FRUIT GHOST
    GLASS GRAPE GREEN HAPPY HEART HELLO HORSE HOTEL HOUSE JUICE KNIFE LEMON LIGHT LUCKY MAGIC MAPLE MONEY MOUSE
    MUSIC NIGHT OCEAN ONION PAPER PARTY PEACH PHONE PIANO PILOT PIZZA PLANE PLANT QUEEN QUICK RADIO RIVER ROBOT
    SEVEN SHEEP SMILE SNAKE SPACE SPOON STONE SUGAR TABLE TIGER TRAIN TRUCK VIDEO VOICE WATER WHALE WHITE WORLD
    YOUNG ZEBRA ANIMAL BANANA BOTTLE BRIDGE BUTTER CAMERA CANDLE CASTLE CHEESE CHERRY CIRCLE COFFEE COOKIE DINNER
    DOCTOR DRAGON FAMILY FINGER FLOWER FOREST FRIEND GARDEN GUITAR ISLAND JUNGLE KITTEN LETTER MARKET MIRROR MONKEY
    MUSEUM NUMBER OFFICE ORANGE PENCIL PEPPER PLANET POCKET POTATO PURPLE PUZZLE RABBIT ROCKET SCHOOL SILVER SPRING
    SQUARE STREET SUMMER SUNDAY TICKET TOMATO TUNNEL TURTLE VELVET WINDOW WINTER WIZARD YELLOW
    """.split()
)
