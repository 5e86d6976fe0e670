"""Common English words of five letters, for games."""

_TEXT = """
    about above abuse actor acute admit adopt adult after again agent agree ahead alarm album alert
    alike alive allow alone along alter among anger angle angry apart apple apply arena argue arise
    armor array aside asset audio avoid award aware awful bacon badge baker basic basin basis beach
    beard beast began begin being below bench berry birth black blade blame blank blast blaze blend
    bless blind block blood bloom board boast bonus boost booth bound brain brake brand brass brave
    bread break breed brick bride brief bring broad brook broom brown brush build bunch burst cabin
    cable camel canal candy cargo carry carve catch cause cease chain chair chalk charm chart chase
    cheap check cheek cheer chess chest chief child chill choir chord civic claim clash class clean
    clear clerk click cliff climb clock close cloth cloud coach coast coral couch cough could count
    court cover crack craft crane crash crazy cream crime crisp cross crowd crown crude cruel crush
    curve cycle daily dairy dance dealt death debut decay delay depth diary dirty ditch doubt dough
    dozen draft drain drama drank dream dress dried drift drill drink drive drove dusty eager eagle
    early earth eight elbow elder elect empty enemy enjoy enter entry equal error essay event every
    exact exist extra faint fairy faith false fancy fault favor feast fence ferry fever fiber field
    fiery fifth fifty fight final first flame flash fleet flesh float flock flood floor flour fluid
    flute focus force forge forth found frame fraud fresh front frost fruit funny ghost giant given
    glass globe glory glove grace grade grain grand grant grape graph grasp grass grave great green
    greet grief grill gross group grove guard guess guest guide habit happy harsh haste haven heart
    heavy hedge hello honey honor horse hotel house human humor hurry ideal image index inner input
    irony issue ivory jelly jewel joint judge juice knife knock known label labor large laser later
    laugh layer learn least leave legal lemon level lever light limit linen liver local lodge logic
    loose lover lower loyal lucky lunar lunch magic major maker maple march marry match maybe mayor
    medal mercy merit merry metal meter midst might miner minor mixed model money month moral motor
    mount mouse mouth movie music naval nerve never night noble noise north novel nurse ocean offer
    often olive onion opera orbit order organ other otter outer owner oxide paint panel panic paper
    party paste patch pause peace peach pearl phase phone photo piano piece pilot pitch place plain
    plane plant plate point polar porch pound power press price pride prime print prior prize proof
    proud prove pulse punch pupil purse queen query quest quick quiet quite quote radar radio raise
    ranch range rapid ratio reach ready realm rebel reply rider ridge rifle right rigid river roast
    robin robot rough round route royal rural salad salty sauce scale scarf scene scent score scout
    screw sense serve seven shade shake shape share sharp sheep sheet shelf shell shift shine shirt
    shock shore short shout shown sight silly since skill skirt slate sleep slice slide slope small
    smart smell smile smoke snake solar solid solve sorry sound south space spare spark speak speed
    spell spend spice spine spoon sport spray squad stack staff stage stair stamp stand stare start
    state steam steel steep stick still stock stone stool store storm story stove straw strip study
    stuff style sugar suite sunny super surge sweet swift swing sword table taken taste teach tempo
    thank theme thick thief thing think third thorn three throw thumb tiger tight tired title toast
    today token tooth topic torch total touch tough tower toxic trace track trade trail train treat
    trend trial tribe trick troop truck truly trunk trust truth tulip twice twist uncle under union
    unity until upper upset urban usage usual valid value vapor vault venue verse video virus visit
    vital vivid vocal voice voter wagon waste watch water weary weave wheat wheel where while white
    whole widow width woman world worry worth would wound wrist write wrong yacht yield young youth
    zebra
"""
WORDS = tuple(_TEXT.split())
