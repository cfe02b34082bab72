/** True on touch screens, which mostly have no mouse and no keyboard. */
export const coarse = matchMedia("(pointer: coarse)");
