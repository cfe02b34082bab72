/** Whether fingers are what people point with here: then there is no mouse, and mostly no keyboard but that on the screen. */
export const coarse = matchMedia("(pointer: coarse)");
